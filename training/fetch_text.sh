#!/bin/sh
# Fetches the text that `tiny` is trained on: the Jargon File (public domain), out of Debian's package dict-jargon.
#   training/fetch_text.sh DIRECTORY     leaves DIRECTORY/jargon.dict.dz and the package's copyright file
# Needs apt-get and dpkg (Debian, Ubuntu). Nothing is installed and root is not needed.
set -eu

directory=${1:?name the directory that the text shall go to}
expected=856ced964d3a3cfd79a3dc251df04365eefd848966e3ae94e58f2671d6e79ca5
mkdir -p "$directory"
cd "$directory"

apt-get download dict-jargon
dpkg -x dict-jargon_*.deb unpacked
cp unpacked/usr/share/dictd/jargon.dict.dz unpacked/usr/share/doc/dict-jargon/copyright .
rm -r unpacked dict-jargon_*.deb

# Another packaging of the same text trains as well, but not the same model: say so and go on.
echo "$expected  jargon.dict.dz" | sha256sum --check --quiet ||
    echo "jargon.dict.dz is not the file of dict-jargon 4.4.7-3.1 that the shipped weights were trained on." >&2
