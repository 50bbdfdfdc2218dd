"""What `generate.py` writes its pages with: one module per kind of page, and what they share."""
