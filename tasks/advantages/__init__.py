"""Computes advantages from rewards, within groups or per token, and flags samples whose reward is uncertain.

Contains pure functions of tensors, and the table of estimators. Algorithms use the advantages; stages store them.
"""
