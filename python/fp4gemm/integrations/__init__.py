"""Other libraries that run models, with fp4gemm's layers inside; none is imported before it is used."""
