"""What a profiler saw of a step, by the terms of the estimator."""
