"""Containers of quantized operands, and conversion from and to the conventions of other libraries."""
