"""SQL over the events directory: compaction to Parquet, base views and one question per file."""
