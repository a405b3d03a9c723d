"""Seeded parquet pages: manifest, draw, reader, packing, page dataset, token cache."""
