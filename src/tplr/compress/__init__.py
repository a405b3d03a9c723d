"""Tensors ↔ bytes: chunks, DCT, top-k, Elias–Fano indices, quantized values, and the update that holds them."""
