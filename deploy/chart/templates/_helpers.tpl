{{- define "baton.fullname" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{/* All pools with their defaults filled in: {"pools": {name: settings}}, as YAML. */}}
{{- define "baton.pools" -}}
{{- $pools := dict -}}
{{- range $name, $own := .Values.workers -}}
{{- $pool := mustMergeOverwrite (deepCopy $.Values.workerDefaults) (deepCopy (default dict $own)) -}}
{{- if not $pool.ports.sideChannel -}}
{{- $_ := set $pool.ports "sideChannel" (ternary 5600 5640 (eq $pool.role "prefill")) -}}
{{- end -}}
{{- if not $pool.ports.kvEventsReplay -}}
{{- $_ := set $pool.ports "kvEventsReplay" (ternary 5520 5540 (eq $pool.role "prefill")) -}}
{{- end -}}
{{- if not $pool.preStopSeconds -}}
{{- $_ := set $pool "preStopSeconds" (ternary 10 (max 10 (div (add $pool.leaseSeconds 1) 2)) (eq $pool.role "decode")) -}}
{{- end -}}
{{- $_ := set $pools $name $pool -}}
{{- end -}}
{{- dict "pools" $pools | toYaml -}}
{{- end }}

{{/* TLS at the gRPC port. */}}
{{- define "baton.tlsMode" -}}
{{- if .Values.filter.tls.mode -}}
{{ .Values.filter.tls.mode }}
{{- else -}}
{{ ternary "self_signed" "none" (eq .Values.gateway.kind "inferencePool") }}
{{- end -}}
{{- end }}

{{/* baton.yaml: what the chart knows, and the values' own over it. */}}
{{- define "baton.config" -}}
{{- $pools := (include "baton.pools" . | fromYaml).pools -}}
{{- $lease := 0 -}}
{{- range $pools -}}{{- $lease = max $lease (int .leaseSeconds) -}}{{- end -}}
{{- $workers := dict -}}
{{- if eq .Values.filter.discovery "kubernetes" -}}
{{- $selector := dict "app.kubernetes.io/instance" .Release.Name "app.kubernetes.io/component" "worker" -}}
{{- $_ := set $workers "kubernetes" (dict "pods" (list (dict "selector" $selector "ports" (list "http")))) -}}
{{- else -}}
{{- $names := list -}}
{{- range $name, $pool := $pools -}}
{{- $host := printf "%s-%s-pods.%s.svc.%s" (include "baton.fullname" $) $name $.Release.Namespace $.Values.clusterDomain -}}
{{- $names = append $names (dict "role" $pool.role "name" $host "port" (int $pool.ports.http) "labels" (dict "pool" $name)) -}}
{{- end -}}
{{- $_ := set $workers "dns" $names -}}
{{- end -}}
{{- if .Values.secrets.apiKey.name -}}
{{- $_ := set $workers "api_key_file" "/etc/baton-secrets/api-key/api-key" -}}
{{- end -}}
{{- $tls := dict "mode" (include "baton.tlsMode" .) -}}
{{- if eq $tls.mode "files" -}}
{{- $_ := set $tls "cert_file" "/etc/baton-tls/tls.crt" -}}
{{- $_ := set $tls "key_file" "/etc/baton-tls/tls.key" -}}
{{- end -}}
{{- $config := dict
  "listen" "0.0.0.0:9002"
  "epp" (dict "enabled" true)
  "tls" $tls
  "workers" $workers
  "handoff" (dict "lease_s" $lease)
  "drain" (dict "delay_s" .Values.filter.drain.delaySeconds "timeout_s" .Values.filter.drain.timeoutSeconds)
  "limits" (dict "max_held_bytes" 536870912)
  "envoy" (dict "idle_timeout_s" .Values.gateway.idleTimeoutSeconds "access_log" false "stats" false)
  "observe" (dict "sample" 0)
-}}
{{- if include "baton.shares" . -}}
{{- $_ := set $config "replicas" (dict
  "listen" "0.0.0.0:9005"
  "dns" (printf "%s-filter-peers.%s.svc.%s" (include "baton.fullname" .) .Release.Namespace .Values.clusterDomain)
  "secret_file" "/etc/baton-secrets/peers/secret"
  "plaintext" true) -}}
{{- end -}}
{{- if include "baton.eventPorts" . | fromYaml -}}
{{- $_ := set $config "kv_events" (dict "enabled" true) -}}
{{- $_ := set $config "tokens" (dict "ask_workers" "tokenize") -}}
{{- end -}}
{{- mustMergeOverwrite $config (deepCopy .Values.filter.config) | toYaml -}}
{{- end }}

{{/* Hardening of a pod that needs nothing. */}}
{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Peers of a NetworkPolicy: the gateway's pods. */}}
{{- define "baton.gatewayPeers" -}}
{{- if .Values.networkPolicy.gateway -}}
{{ toYaml .Values.networkPolicy.gateway }}
{{- else if eq .Values.gateway.kind "istio" -}}
- namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ .Values.gateway.istio.namespace }}}}
  podSelector: {matchLabels: {{ toJson .Values.gateway.istio.workloadLabels }}}
{{- else -}}
- namespaceSelector:
    matchExpressions:
      - {key: kubernetes.io/metadata.name, operator: In, values: {{ toJson .Values.networkPolicy.gatewayNamespaces }}}
{{- end -}}
{{- end }}

{{/* Headers with which a client could choose workers or sources of KV blocks: extproc/headers.py has the list. */}}
{{- define "baton.routingHeaders" -}}
- x-gateway-destination-endpoint
- x-gateway-destination-endpoint-subset
- x-gateway-destination-endpoint-served
- x-kv-transfer
- x-prefiller-host-port
- x-encoder-hosts-ports
- x-data-parallel-host-port
- x-data-parallel-rank
- x-kv-cache-source-host-port
- x-gateway-model-name
- x-baton-pool
{{- end }}

{{/* HTTP ports of all pools, each once: the keys of a mapping. */}}
{{- define "baton.httpPorts" -}}
{{- $ports := dict -}}
{{- range (include "baton.pools" . | fromYaml).pools -}}
{{- $_ := set $ports (toString (int .ports.http)) true -}}
{{- end -}}
{{- toYaml $ports -}}
{{- end }}

{{/* Ports at which workers say what they hold, and again what was missed: the first -> the last one, of all pools. */}}
{{- define "baton.eventPorts" -}}
{{- $ports := dict -}}
{{- range (include "baton.pools" . | fromYaml).pools -}}
{{- if .ports.kvEvents -}}
{{- $more := sub .ranks 1 -}}
{{- range $first := list .ports.kvEvents .ports.kvEventsReplay -}}
{{- $_ := set $ports (toString (int $first)) (max (int (add $first $more)) (int (get $ports (toString (int $first)) | default 0))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $ports -}}
{{- end }}

{{/* "true" where replicas tell each other what they do. */}}
{{- define "baton.shares" -}}
{{- if and .Values.filter.sharing.enabled (gt (int .Values.filter.replicas) 1) }}true{{ end -}}
{{- end }}

{{- define "baton.peersSecret" -}}
{{- default (printf "%s-filter-peers" (include "baton.fullname" .)) .Values.filter.sharing.secretName -}}
{{- end }}
