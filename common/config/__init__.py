"""Config files: loading, the schema, the batch plan."""
