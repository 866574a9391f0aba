"""Stands in for NLTK in processes that tests start: MindFormers imports it, with scikit-learn and SciPy's statistics, for
a metric (BLEU) that no recipe here has. A quarter of the import of MindFormers, in more than a hundred processes."""
