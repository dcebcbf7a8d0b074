"""What is applied to a cluster: rendered as Helm renders it, and judged without a cluster."""
