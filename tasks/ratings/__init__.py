"""Comparisons of samples by people: the answers of a run, the choice of pairs, figures, and the page for raters."""
