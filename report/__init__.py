"""Reports: tables for the terminal, JSON, CSV, HTML pages and pictures of results.

A *figure* in text is a number that a report shows. `pages.Figure` is a drawing in a page.
"""
