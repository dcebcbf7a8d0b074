#!/bin/sh
# Builds kube-apiserver from Debian's source package, with Debian's Go, and takes etcd from its package; nothing is installed.
# Usage: sh tests/kube/build.sh FOLDER. FOLDER gets etcd and kube-apiserver. Five to ten minutes on two cores, 4 GB of disk meanwhile.
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
(cd debs && apt-get download "golang-$version-go" "golang-$version-src" golang-github-modern-go-reflect2-dev etcd-server) > debs.log 2>&1 || { cat debs.log >&2; exit 1; }
for package in debs/*.deb; do dpkg -x "$package" root; done
install -m 755 root/usr/bin/etcd "$folder/etcd"

echo "building kube-apiserver with Go $version"
# As Debian builds it: not as a module, but with what stands in its folder vendor. Without the code of clouds, a third of it.
mkdir -p go/src/k8s.io
dpkg-source --no-check -x kubernetes_*.dsc go/src/k8s.io/kubernetes > source.log 2>&1 || { cat source.log >&2; exit 1; }
export GOROOT="$work/root/usr/lib/go-$version" GOCACHE="$work/cache" GOPATH="$work/go" GO111MODULE=off GOPROXY=off CGO_ENABLED=0
export PATH="$GOROOT/bin:$PATH"
release=$(sed -n 's/^Version: .*really\([0-9.]*\).*/\1/p' kubernetes_*.dsc | head -1)
minor=${release#*.}
at=k8s.io/kubernetes/vendor/k8s.io/component-base/version
flags="-s -w -X $at.gitVersion=v$release -X $at.gitMajor=1 -X $at.gitMinor=${minor%%.*}"
cd go/src/k8s.io/kubernetes
# What is in vendor reads maps in a way that Go 1.18 has changed: the server would die of the first custom resource.
rm vendor/github.com/modern-go/reflect2/*.go vendor/github.com/modern-go/reflect2/*.s
cp "$work"/root/usr/share/gocode/src/github.com/modern-go/reflect2/*.go "$work"/root/usr/share/gocode/src/github.com/modern-go/reflect2/*.s \
  vendor/github.com/modern-go/reflect2/

echo "  descriptions of its types, which it does not start without and the package lacks"
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
typed=$(grep -Rl --include='*.go' '+k8s:openapi-gen=' cmd pkg plugin vendor/k8s.io/ \
  | grep -v -e k8s.io/code-generator/ -e k8s.io/sample-apiserver/ -e kube-openapi/ -e gengo/ -e zz_generated -e _test.go \
  | xargs -n1 dirname | LC_ALL=C sort -u | sed 's|^|k8s.io/kubernetes/|' | paste -sd, -)
"$work/openapi-gen" -i "$typed" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/report"

echo "  the server"
go build -tags providerless -ldflags "$flags" -o "$folder/kube-apiserver.new" ./cmd/kube-apiserver
mv "$folder/kube-apiserver.new" "$folder/kube-apiserver"
"$folder/kube-apiserver" --version
