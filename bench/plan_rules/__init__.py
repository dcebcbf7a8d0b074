"""The field's rules of thumb about P:D ratios, checked with what `baton plan ratio` does."""
