"""How runs are told: statistics, tables, figures and a page."""
