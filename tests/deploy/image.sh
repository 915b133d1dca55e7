#!/usr/bin/env bash
# Builds the image on a base made by debootstrap and runs it as a cluster would: read-only root, no
# capabilities, an ordinary user and then a user that no passwd entry knows. Debian and root needed.
#
#   tests/deploy/image.sh cpu MODEL_DIR
#   tests/deploy/image.sh gpu MODEL_DIR [TORCH_REQUIREMENT]   the GPU variant, run with LACUNAR_DEVICE=cpu
#
# WORK (default build/image) keeps the base and the image store; RUN_ONLY=1 skips the build.
set -euo pipefail
cd "$(dirname "$0")/../.."

device=${1:?cpu or gpu} model=$(realpath "${2:?a model directory}") torch=${3:-}
work=$(realpath -m "${WORK:-build/image}")
mkdir -p "$work"
missing=()
for tool in buildah podman debootstrap runc curl; do command -v "$tool" >/dev/null || missing+=("$tool"); done
if ((${#missing[@]})); then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "${missing[@]}"
fi

# vfs copies the whole tree for each layer; take it only where overlay cannot be mounted.
export STORAGE_DRIVER=${STORAGE_DRIVER:-overlay}
store=(--root "$work/store" --runroot "$work/run")
base=localhost/lacunar-base:bookworm
image=localhost/lacunar:$device

build() {
  if ! buildah "${store[@]}" inspect --type image "$base" >/dev/null 2>&1; then
    rm -rf "$work/base"
    debootstrap --variant=minbase \
      --include=ca-certificates,python3,python3-dev,python3-venv,python-is-python3 bookworm "$work/base" >"$work/debootstrap.log"
    local container
    container=$(buildah "${store[@]}" from scratch)
    buildah "${store[@]}" copy --quiet "$container" "$work/base" /
    buildah "${store[@]}" config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    buildah "${store[@]}" commit --quiet --rm "$container" "$base"
    rm -rf "$work/base"
  fi
  # The build asks the registries that this machine's pip is set up for, as this machine asks them: pip's
  # settings are copied, and the files and folders they name are mounted. None of it stays in the image.
  local volumes=() path
  while read -r path; do volumes+=(--volume "$path:$path:ro"); done < <(python3 - "$work/pip.conf" <<'PYTHON'
import ast, subprocess, sys
from pathlib import Path
from urllib.parse import urlparse

settings = {}
listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
for line in listed.stdout.splitlines():
    name, _, value = line.partition("=")
    section, _, key = name.rpartition(".")
    if key in ("cert", "find-links", "index-url", "extra-index-url", "constraint", "trusted-host"):
        # The environment outranks the files, as in pip.
        if key not in settings or section == ":env:":
            settings[key] = ast.literal_eval(value).split()
Path(sys.argv[1]).write_text("[global]\n" + "".join(f"{key} = {' '.join(words)}\n" for key, words in settings.items()))
paths = {Path(urlparse(word).path) for words in settings.values() for word in words if word.startswith(("/", "file://"))}
# An index's pages may link to files beside it.
paths = {path.parent if path.name == "simple" else path for path in paths}
print("\n".join(sorted(str(path) for path in paths if path.exists())))
PYTHON
  )
  volumes+=(--volume "$work/pip.conf:/etc/pip.conf:ro")
  buildah "${store[@]}" build --layers --isolation chroot --format docker --pull=never --network host \
    "${volumes[@]}" --build-arg "BASE=$base" --build-arg "DEVICE=$device" --build-arg TORCH_CPU_INDEX= \
    --build-arg "TORCH_REQUIREMENT=$torch" ${CUDA_ARCHITECTURES:+--build-arg "CUDA_ARCHITECTURES=$CUDA_ARCHITECTURES"} \
    --tag "$image" .
}

# check USER PORT: start, wait until it is ready, ask, scrape, stop.
check() {
  local user=$1 port=$2 name="lacunar-$device-$2" begin=$SECONDS
  local run=(podman "${store[@]}" --cgroup-manager cgroupfs --runtime runc)
  # podman asks for higher limits than a machine without CAP_SYS_RESOURCE may give; crun refuses hybrid cgroups.
  # Without systemd podman has no timer for a health check, so the image's own command is run below.
  # shellcheck disable=SC2064  # the values of now
  trap "${run[*]} logs $name; ${run[*]} rm --force --time 5 $name >/dev/null" EXIT
  "${run[@]}" run --detach --name "$name" --read-only --read-only-tmpfs=false --cap-drop=ALL \
    --security-opt no-new-privileges --ulimit "nofile=$(ulimit -Hn)" --ulimit nproc=4096 --network host --user "$user" \
    --no-healthcheck \
    --tmpfs /tmp:mode=1777 --tmpfs /var/cache/lacunar:mode=1777 --volume "$model:/models/model:ro" \
    --env LACUNAR_HOST=127.0.0.1 --env "LACUNAR_PORT=$port" --env LACUNAR_DEVICE=cpu "$image" >/dev/null
  timeout 180 bash -c "until curl --silent --fail http://127.0.0.1:$port/readyz >/dev/null; do read -rt 0.5 <> <(:) || :; done"
  echo "$device, user $user: ready after $((SECONDS - begin)) s; $("${run[@]}" exec "$name" id)"
  "${run[@]}" exec "$name" sh -c 'if touch /opt/lacunar/x 2>/dev/null; then echo "the root is writable" >&2; exit 1; fi
    for tool in cc g++ gcc nvcc; do if command -v $tool; then echo "a compiler is in the image" >&2; exit 1; fi; done
    python -c "import json; parts = json.load(open(\"/opt/lacunar/sbom.cdx.json\"))[\"components\"]
names = {part[\"name\"] for part in parts}; assert {\"lacunar\", \"torch\", \"transformers\"} <= names, names
print(len(parts), \"components in the bill of materials\")"
    grep -E "^Cap(Eff|Bnd):\s+0+$" /proc/1/status; tr "\0" " " </proc/1/cmdline; echo'
  local body="{\"model\": \"model\", \"prompt\": \"The capital of France is\", \"max_tokens\": 8, \"temperature\": 0}"
  curl --silent --fail "http://127.0.0.1:$port/v1/completions" -H 'content-type: application/json' -d "$body"
  echo
  curl --silent --fail "http://127.0.0.1:$port/metrics" >"$work/metrics-$port.txt"
  grep -E '^lacunar_(requests_total|build_info)' "$work/metrics-$port.txt"
  grep -qx 'lacunar_requests_total{endpoint="completions"} 1.0' "$work/metrics-$port.txt"
  local healthcheck
  mapfile -d '' -t healthcheck < <("${run[@]}" image inspect --format '{{json .HealthCheck.Test}}' "$image" |
    python3 -c 'import json, sys; print(*json.load(sys.stdin)[1:], sep="\0", end="\0")')
  ((${#healthcheck[@]} > 1))
  "${run[@]}" exec "$name" "${healthcheck[@]}"
  echo "healthcheck: healthy"
  "${run[@]}" stop --time 60 "$name" >/dev/null
  local status
  status=$("${run[@]}" inspect --format '{{.State.ExitCode}}' "$name")
  echo "exit status after SIGTERM: $status"
  trap - EXIT
  "${run[@]}" rm "$name" >/dev/null
  [[ $status == 0 ]]
}

[[ ${RUN_ONLY:-} ]] || build
podman "${store[@]}" images
check 10001:0 "${PORT:-18000}"
check 123456:0 "$((${PORT:-18000} + 1))"
echo "The $device image is built and works."
