"""Anybody's images as TFRecord shards: find them, write shards, verify them, read their records."""
