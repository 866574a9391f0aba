"""Stands in for NLTK in processes that tests start.

MindFormers imports it, and with it scikit-learn and SciPy's statistics, for a metric (BLEU) that no recipe here has: a
quarter of the import, in more than a hundred processes.
"""
