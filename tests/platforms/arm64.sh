#!/bin/sh
# Runs edgekv on Linux for Arm64 under qemu-user, on a machine with Debian's tools:
#
#     apt-get install qemu-user-static
#     sh tests/platforms/arm64.sh                           # tokens and caches, compared with this machine's
#     sh tests/platforms/arm64.sh suite                     # the tests that need neither the HTP nor seconds each; hours
#     sh tests/platforms/arm64.sh suite tests/edgekv/plan/test_size.py  # these files of it
#     sh tests/platforms/arm64.sh tests/edgekv/kv/test_kv_slot.py ... # pytest of these files
#
# Debian's Python for Arm64 and the wheels for aarch64 are unpacked into build/arm64; nothing is installed.
# onnxruntime 1.31.1 crashes in qemu 7.2 while it is imported, so 1.27.0 is used. SME is off: with qemu's SME,
# DynamicQuantizeMatMul of onnxruntime returns other numbers than on any other processor.
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
folder=$here/build/arm64
python=${PYTHON:-$here/.venv/bin/python}
if [ ! -e "$folder/ready" ]; then
    rm -rf "$folder"
    mkdir -p "$folder/apt/lists/partial" "$folder/apt/cache/archives/partial" "$folder/sysroot" "$folder/site"
    : > "$folder/apt/status"
    apt="apt-get -qq -o Dir::State=$folder/apt -o Dir::State::status=$folder/apt/status -o Dir::Cache=$folder/apt/cache
        -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Debug::NoLocking=1 -o APT::Sandbox::User="
    $apt update
    $apt --yes --no-install-recommends --download-only install python3.11 libstdc++6 libatomic1
    for package in "$folder"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$folder/sysroot"; done
    "$python" -m pip install --quiet --quiet --target "$folder/site" --only-binary=:all: --python-version 3.11 \
        --implementation cp --platform manylinux_2_34_aarch64 --platform manylinux_2_31_aarch64 \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
        --platform manylinux2014_aarch64 numpy onnxruntime==1.27.0 tokenizers msgspec jinja2 onnx \
        safetensors ml_dtypes click rich packaging huggingface_hub pytest filelock hypothesis 'llguidance>=1.9' \
        gguf jsonschema matplotlib openai starlette uvicorn dask distributed fsspec bokeh aiobotocore==2.24.0 \
        boto3==1.39.11 moto[server]
    cp -r "$("$python" -c 'from importlib.metadata import distribution as d; print(d("edgekv")._path)')" "$folder/site"
    touch "$folder/ready"
fi
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# A process on Arm64 starts others through this program too: the kernel here cannot run Python for Arm64 by itself.
arm64=$folder/python
cat > "$arm64" <<END
#!/bin/sh
PYTHONPATH=$folder/site:$here\${PYTHONPATH:+:\$PYTHONPATH} QEMU_CPU=max,sve=off,sme=off \\
    exec qemu-aarch64-static -L "$folder/sysroot" "$folder/sysroot/usr/bin/python3.11" "\$@"
END
chmod +x "$arm64"
echo "import sys; sys.executable = '$arm64'" > "$folder/site/sitecustomize.py"
cd "$here"
if [ "${1-}" = suite ]; then
    shift
    "$python" -m tests.platforms.arm64_suite "$arm64" "$folder/results.jsonl" "$@"
elif [ $# -gt 0 ]; then
    "$arm64" -m pytest -q -p no:cacheprovider "$@"
else
    "$python" -m tests.platforms.elsewhere make "$folder/bundle" "$folder/here.npz"
    "$arm64" -m tests.platforms.elsewhere make "$folder/bundle" "$folder/there.npz"
    "$python" -m tests.platforms.elsewhere compare "$folder/here.npz" "$folder/there.npz"
fi
