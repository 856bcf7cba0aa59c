"""How a run lives: its folders, its files, whom it trusts, the signals it hears and the machines it is spread over."""
