"""Readers of JSON Lines and parquet files that streams, preparation and ``tplr data make`` share."""
