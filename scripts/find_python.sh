#!/bin/sh
# Prints a Python that can make the virtual environment: 3.12 or later, or the version named.
# Usage: find_python.sh [3.12]; PYTHON=/path/to/python is taken as it is, when it will do.
wanted=${1:-}

will_do() {
    "$1" - "$wanted" 2>/dev/null <<'EOF'
import ensurepip, sys, venv
wanted = sys.argv[1]
version = "%d.%d" % sys.version_info[:2]
sys.exit(not (version == wanted if wanted else sys.version_info >= (3, 12)))
EOF
}

if [ -n "${PYTHON:-}" ]; then
    will_do "$PYTHON" && echo "$PYTHON" && exit
    echo "PYTHON=$PYTHON is not a Python ${wanted:-3.12 or later} with the modules venv and ensurepip." >&2
    exit 1
fi

# Not on PATH, or there but not answering: what uv manages, and pyenv's versions other than the one
# that .python-version names.
for candidate in python3.13 python3.12 python3 python \
    "$(uv python find --no-python-downloads "${wanted:->=3.12}" 2>/dev/null)" \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
    if [ -n "$candidate" ] && will_do "$candidate"; then
        echo "$candidate"
        exit
    fi
done

echo "No Python ${wanted:-3.12 or later} with the modules venv and ensurepip was found." >&2
echo "Install one (uv python install 3.13, pyenv install 3.13, apt install python3.13-venv)," >&2
echo "or name it: make PYTHON=/path/to/python" >&2
exit 1
