"""Against a real kube-apiserver with etcd: `make kube`. What the double in tests/kube_api claims is checked here."""
