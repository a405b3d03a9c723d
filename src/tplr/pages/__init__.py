"""Reads seeded pages of parquet datasets: manifest, draw, reader, page dataset, token cache, packing."""
