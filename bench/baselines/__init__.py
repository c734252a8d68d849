"""What fp4gemm is compared with: torch's NVFP4 products, humming, a GEMM with a post-scale pass."""
