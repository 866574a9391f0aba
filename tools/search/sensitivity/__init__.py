"""Whether the first place of a search holds within the estimator's error, and what would tell."""
