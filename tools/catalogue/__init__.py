"""The catalogue of recipes: every `card.yaml` and the recipes beside it, as one table in recipes/README.md."""
