#!/bin/bash
# make_tree.sh OUT MANIFEST FACTS: writes a tar file. Each line of MANIFEST has a file, a tab, and its path in the tar
# file, where @version@ stands for that variable of FACTS. Each library gets the links that linkers and loaders look
# for. All may read what is in it, and it has no entry for the folder to which it is unpacked.
set -euo pipefail
shopt -s nullglob
out=$1 manifest=$2
source "$3"

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
while IFS=$'\t' read -r file place; do
  place=${place//@version@/$version}
  mode=644
  if [[ $place == bin/* ]]; then mode=755; fi
  install -D -m "$mode" "$file" "$tree/$place"
done <"$manifest"
for library in "$tree"/lib/*.so."$version"; do
  name=$(basename "$library" ".$version")
  ln -s "$name.$version" "$tree/lib/$name.$abi_version"
  ln -s "$name.$abi_version" "$tree/lib/$name"
done
chmod -R u=rwX,go=rX "$tree"
(cd "$tree" && tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - -- *) >"$out"
