"""Reports of results: tables, pages and pictures."""
