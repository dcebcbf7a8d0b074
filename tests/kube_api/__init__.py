"""A double of the API server of Kubernetes that speaks real HTTP: lists, watches, and what can go wrong with them."""
