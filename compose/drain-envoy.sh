#!/usr/bin/env bash
# Before Envoy is told to end: take no new connections, and wait for the requests that it has. Envoy itself would cut them.
# Its image has no curl, so this speaks HTTP by hand. Ends with 0 when nothing is left, 1 after so many seconds.
#   drain-envoy.sh ADMIN_HOST/ADMIN_PORT SECONDS
set -euo pipefail
admin=$1
seconds_at_most=$2

ask() {
  exec 3<>"/dev/tcp/${admin}"
  printf '%s %s HTTP/1.1\r\nhost:envoy\r\nconnection:close\r\n\r\n' "$1" "$2" >&3
  cat <&3
  exec 3>&-
}

ask POST /healthcheck/fail > /dev/null
ask POST /drain_listeners > /dev/null
for ((second = 0; second < seconds_at_most; second++)); do
  open=$(ask GET '/stats?filter=^http.front.downstream_rq_active$' | tr -d '\r' | sed -n 's/^http.front.downstream_rq_active: //p')
  echo "${open} requests are open"
  if [ "${open}" = 0 ]; then exit 0; fi
  sleep 1
done
exit 1
