"""How large published models are and what memory they take, without their weights."""
