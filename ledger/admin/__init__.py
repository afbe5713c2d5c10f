"""Administration of the catalog: queries and changes, with errors as sentences."""
