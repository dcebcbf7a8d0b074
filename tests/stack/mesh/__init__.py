"""Meshes: what their control planes tell Envoy, as far as it matters here, made from the manifests that we ship."""
