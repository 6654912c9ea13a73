#!/usr/bin/env bash
# Writes the site, build/docs/site/index.html: README, the pages of docs and the API of both languages. Warnings are errors, a link
# inside that leads nowhere among them. Called as `scripts/dev.sh docs`, which has built the module and found Doxygen.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
place="$(pwd)/build/docs"
began=$SECONDS
mkdir -p "$place"

# Sphinx has an environment of its own, so that it decides no version of the other; that one's packages come behind.
tools="$place/env-$(cat scripts/docs_tools.txt <(command -v python) | cksum | cut -d' ' -f1)"
if [ ! -e "$tools/ready" ]; then
  python -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check -r scripts/docs_tools.txt
  python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$tools/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
  touch "$tools/ready"
  printf '[docs] tools: %d s\n' $((SECONDS - began))
fi

# The pages lie as in the repository, beside the files that they link to, so that their links hold here, too.
rm -rf "$place/source" "$place/doxygen"
mkdir -p "$place/source/api" "$place/doxygen"
# Fenced code is left out, where a C++ lambda looks like a link.
linked() { sed '/^```/,/^```/d' "$1"/*.md | grep -oh ']([^):#]*[):#]' | grep -v ':$' | sed -e 's/^](//' -e 's/[)#]$//' -e "s,^,$1/,"; }
{ linked . && linked docs; } | xargs realpath --relative-to=. | sort -u | xargs cp --parents -r -t "$place/source"
cp --parents -r docs csrc/README.md ./*.md "$place/source"
mv "$place/source/docs/site"/{python,cpp}.md "$place/source/api"
cat "$place/source/README.md" docs/site/index.md >"$place/source/index.md"
rm -r "$place/source/README.md" "$place/source/docs/site"
mkdir -p "$place/static" && cp docs/site/site.css "$place/static"

{ cat docs/site/Doxyfile; echo "OUTPUT_DIRECTORY = $place/doxygen"; } | doxygen -
TRIREME_DOXYGEN_XML="$place/doxygen/xml" "$tools/bin/python" -m sphinx --jobs auto --fail-on-warning --keep-going --quiet \
  -c docs/site -D html_static_path="$place/static" -d "$place/doctrees" "$place/source" "$place/site"
printf '[docs] %s: %d s\n' build/docs/site/index.html $((SECONDS - began))
