#!/bin/sh
# Builds kube-apiserver from Debian's source package, with Debian's Go, and takes etcd from its package; nothing is installed.
# Usage: sh tests/kube/build.sh FOLDER. FOLDER gets etcd and kube-apiserver. About ten minutes on two cores, 4 GB of disk meanwhile.
set -eu

folder=$(mkdir -p "$1" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work"

echo "source packages: the sources of this machine, asked for sources too"
mkdir -p lists/partial sources debs
for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do
  if [ -f "$file" ]; then
    sed -e 's/^Types: deb$/Types: deb-src/' -e 's/^deb /deb-src /' "$file" > "sources/$(basename "$file")"
  fi
done
[ -f sources/sources.list ] || : > sources/sources.list
apt="-o Dir::Etc::sourcelist=$work/sources/sources.list -o Dir::Etc::sourceparts=$work/sources -o Dir::State::lists=$work/lists"
# shellcheck disable=SC2086
{ apt-get $apt update && apt-get $apt source --download-only kubernetes; } > source.log 2>&1 || { cat source.log >&2; exit 1; }

echo "Debian's Go and etcd"
go=$(apt-cache depends golang-go | sed -n 's/.*Depends: \(golang-[0-9.]*-go\)$/\1/p' | head -1)
version=${go#golang-}
version=${version%-go}
(cd debs && apt-get download "golang-$version-go" "golang-$version-src" etcd-server) > debs.log 2>&1 || { cat debs.log >&2; exit 1; }
for package in debs/*.deb; do dpkg -x "$package" root; done
install -m 755 root/usr/bin/etcd "$folder/etcd"

echo "building kube-apiserver with Go $version"
dpkg-source --no-check -x kubernetes_*.dsc kubernetes > source.log 2>&1 || { cat source.log >&2; exit 1; }
cd kubernetes
export GOROOT="$work/root/usr/lib/go-$version" GOCACHE="$work/cache" GOPATH="$work/go" GOFLAGS=-mod=vendor GOPROXY=off CGO_ENABLED=0
"$GOROOT/bin/go" build -trimpath -ldflags "-s -w" -o "$folder/kube-apiserver" ./cmd/kube-apiserver
"$folder/kube-apiserver" --version
