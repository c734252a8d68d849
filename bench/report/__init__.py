"""What becomes of results: files of JSON lines, tables, pictures, the report, comparisons of two files."""
