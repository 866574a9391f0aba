"""The only place that predicts the seconds and bytes of a step."""
