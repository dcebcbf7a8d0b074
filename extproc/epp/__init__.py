"""What the endpoint picker of an InferencePool needs beside the filter: its ports, and the conformance suite's headers."""
