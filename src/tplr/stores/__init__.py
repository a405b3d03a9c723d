"""Token stores: formats, writer, preprocessing, window datasets, sampler, publishing and verification."""
