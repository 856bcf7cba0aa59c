"""The rules by which the claims of the literature are judged from the committed results."""
