"""The report of finished runs: statistics, tables, figures and a page."""
