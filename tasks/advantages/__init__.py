"""From rewards to advantages: within groups, or per token by an estimator of a table; and how far a reward is doubted.

Pure functions of tensors, and the estimators. What is done with advantages is the algorithms'; where they are stored is
the stages'.
"""
