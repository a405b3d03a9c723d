"""Tensors ↔ bytes: chunks, DCT, top-k, packed indices, quantized values, and the update that holds them."""
