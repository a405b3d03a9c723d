"""Converts tensors to bytes and back: chunks, DCT, top-k, Elias–Fano indices, quantized values, and whole updates."""
