{{/*
Pod template of a pool. Argument: {root, name, pool}.
*/}}
{{- define "baton.workerLabels" -}}
{{ include "baton.selector" .root }}
app.kubernetes.io/component: worker
baton/pool: {{ .name }}
{{- end }}

{{- define "baton.workerPod" -}}
{{- $root := .root }}
{{- $pool := .pool }}
{{- $values := $root.Values }}
{{- $group := eq $pool.kind "leaderWorkerSet" }}
metadata:
  labels:
    {{- include "baton.workerLabels" . | nindent 4 }}
    # llm-d's name for it; the filter reads it too.
    llm-d.ai/role: {{ ternary "prefill-decode" $pool.role (eq $pool.role "both") }}
    # Gateways send requests to these.
    baton/decodes: {{ ne $pool.role "prefill" | quote }}
    {{- with $pool.podLabels }}{{- toYaml . | nindent 4 }}{{- end }}
  {{- with $pool.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "baton.fullname" $root }}-worker
  automountServiceAccountToken: false
  enableServiceLinks: false
  # preStop, the requests, the launcher's teardown, and a margin.
  terminationGracePeriodSeconds: {{ add $pool.preStopSeconds $pool.drainSeconds 45 }}
  hostIPC: {{ $pool.hostIPC }}
  securityContext: {{- include "baton.podSecurity" $root | nindent 4 }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $field := list "priorityClassName" "runtimeClassName" "schedulerName" }}
  {{- with get $pool $field }}
  {{ $field }}: {{ . }}
  {{- end }}
  {{- end }}
  {{- range $field := list "nodeSelector" "tolerations" "affinity" }}
  {{- with get $pool $field }}
  {{ $field }}: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  containers:
    - name: worker
      image: {{ $pool.image }}
      imagePullPolicy: {{ $pool.imagePullPolicy }}
      {{- if and $group $pool.group.dataParallelSize }}
      {{- $local := required (printf "workers.%s.group.dataParallelLocal: with dataParallelSize" .name) $pool.group.dataParallelLocal }}
      # Each pod answers for its own ranks, and is a worker of its own to the filter.
      command:
        - sh
        - -c
        - exec baton worker --data-parallel-size={{ $pool.group.dataParallelSize }} --data-parallel-local={{ $local }} --data-parallel-rank="$((LWS_WORKER_INDEX * {{ $local }}))" --data-parallel-address="$LWS_LEADER_ADDRESS" "$@"
        - worker
      {{- else }}
      command: [baton, worker]
      {{- end }}
      args:
        - --role={{ $pool.role }}
        - --lease={{ $pool.leaseSeconds }}
        - --drain={{ $pool.drainSeconds }}
        - --kv-events-port={{ $pool.ports.kvEvents }}
        - --kv-events-replay-port={{ ternary $pool.ports.kvEventsReplay 0 (gt (int $pool.ports.kvEvents) 0) }}
        {{- range $pool.args }}
        - {{ . | quote }}
        {{- end }}
      env:
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: BATON_PROFILE, value: {{ default $values.model.profile $pool.profile | quote }}}
        {{- with default $values.model.name $pool.model }}
        - {name: BATON_MODEL, value: {{ . | quote }}}
        {{- end }}
        {{- with $values.model.servedName }}
        - {name: BATON_SERVED_MODEL_NAME, value: {{ . | quote }}}
        {{- end }}
        {{- with $pool.variant }}
        - {name: BATON_VARIANT, value: {{ . | quote }}}
        {{- end }}
        {{- if $pool.tensorParallelSize }}
        - {name: BATON_TENSOR_PARALLEL_SIZE, value: {{ $pool.tensorParallelSize | quote }}}
        {{- end }}
        - {name: BATON_ENGINE, value: {{ $pool.engine }}}
        - {name: BATON_PREFLIGHT, value: {{ $pool.preflight | quote }}}
        - {name: BATON_WORKER_HOST, value: 0.0.0.0}
        - {name: BATON_WORKER_PORT, value: {{ $pool.ports.http | quote }}}
        # What peers are told.
        - {name: BATON_SIDE_CHANNEL_HOST, value: {{ default "$(POD_IP)" $pool.sideChannelHost | quote }}}
        - {name: BATON_SIDE_CHANNEL_PORT, value: {{ $pool.ports.sideChannel | quote }}}
        - {name: UCX_TCP_PORT_RANGE, value: "{{ $pool.ucx.tcpPorts.first }}-{{ $pool.ucx.tcpPorts.last }}"}
        {{- with $pool.ucx.tls }}
        - {name: BATON_UCX_TLS, value: {{ . | quote }}}
        {{- end }}
        {{- with $pool.ucx.netDevices }}
        - {name: BATON_UCX_NET_DEVICES, value: {{ . | quote }}}
        {{- end }}
        {{- $cache := $pool.cacheServer }}
        {{- if and (not $cache) $values.cache.enabled (ne $pool.role "decode") }}
        {{- $cache = printf "%s-cache.%s.svc.%s:5555" (include "baton.fullname" $root) $root.Release.Namespace $values.clusterDomain }}
        {{- end }}
        {{- with $cache }}
        - {name: BATON_CACHE_SERVER, value: {{ . | quote }}}
        {{- end }}
        {{- if $values.secrets.apiKey.name }}
        - {name: BATON_API_KEY_FILE, value: /etc/baton-secrets/api-key/api-key}
        {{- end }}
        {{- if $values.secrets.hfToken.name }}
        - {name: BATON_HF_TOKEN_FILE, value: /etc/baton-secrets/hf-token/token}
        {{- end }}
        - {name: HF_HOME, value: /models}
        - {name: HOME, value: /var/cache/baton}
        {{- with $pool.env }}{{- toYaml . | nindent 8 }}{{- end }}
      ports:
        - {name: http, containerPort: {{ $pool.ports.http }}}
        {{- range $rank := until (int $pool.ranks) }}
        - {name: nixl-{{ $rank }}, containerPort: {{ add $pool.ports.sideChannel $rank }}}
        {{- if $pool.ports.kvEvents }}
        - {name: kv-events-{{ $rank }}, containerPort: {{ add $pool.ports.kvEvents $rank }}}
        - {name: kv-replay-{{ $rank }}, containerPort: {{ add $pool.ports.kvEventsReplay $rank }}}
        {{- end }}
        {{- end }}
      # Loading a model takes minutes: until then the other two do not begin.
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $pool.startup.timeoutSeconds 4) 5 }}
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 3
      # Long prompts keep the server's loop busy: a slow answer is not a dead engine.
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      lifecycle:
        # The pod is no longer ready: whoever sends requests hears of it now.
        preStop: {exec: {command: [sleep, {{ $pool.preStopSeconds | quote }}]}}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
          {{- if $pool.rdma.enabled }}
          # RDMA pins memory.
          add: [IPC_LOCK]
          {{- end }}
      resources:
        {{- $resources := deepCopy $pool.resources }}
        {{- range $bound := list "requests" "limits" }}
        {{- $_ := set $resources $bound (default dict (get $resources $bound)) }}
        {{- end }}
        {{- $devices := dict }}
        {{- if $pool.gpu.count }}{{- $_ := set $devices $pool.gpu.resource $pool.gpu.count }}{{- end }}
        {{- if $pool.rdma.enabled }}{{- $_ := set $devices $pool.rdma.resource $pool.rdma.count }}{{- end }}
        {{- if $pool.hugepages.size }}{{- $_ := set $devices (printf "hugepages-%s" $pool.hugepages.size) $pool.hugepages.amount }}{{- end }}
        {{- $_ := set $resources "requests" (merge $resources.requests $devices) }}
        {{- $_ := set $resources "limits" (merge $resources.limits $devices) }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        - {name: cache, mountPath: /var/cache/baton}
        {{- if ne $pool.modelCache.type "none" }}
        - {name: models, mountPath: /models}
        {{- end }}
        {{- if $pool.hugepages.size }}
        - {name: hugepages, mountPath: /hugepages}
        {{- end }}
        {{- if $values.secrets.apiKey.name }}
        - {name: api-key, mountPath: /etc/baton-secrets/api-key, readOnly: true}
        {{- end }}
        {{- if $values.secrets.hfToken.name }}
        - {name: hf-token, mountPath: /etc/baton-secrets/hf-token, readOnly: true}
        {{- end }}
  volumes:
    # The container's own has 64 MiB.
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $pool.shmSize }}}}
    - {name: tmp, emptyDir: {}}
    - {name: cache, emptyDir: {}}
    {{- if eq $pool.modelCache.type "emptyDir" }}
    - {name: models, emptyDir: {sizeLimit: {{ $pool.modelCache.sizeLimit }}}}
    {{- else if eq $pool.modelCache.type "pvc" }}
    - {name: models, persistentVolumeClaim: {claimName: {{ required (printf "workers.%s.modelCache.claimName: type pvc needs it" .name) $pool.modelCache.claimName }}}}
    {{- else if eq $pool.modelCache.type "hostPath" }}
    - {name: models, hostPath: {type: DirectoryOrCreate, path: {{ required (printf "workers.%s.modelCache.path: type hostPath needs it" .name) $pool.modelCache.path }}}}
    {{- end }}
    {{- if $pool.hugepages.size }}
    - {name: hugepages, emptyDir: {medium: HugePages-{{ $pool.hugepages.size }}}}
    {{- end }}
    {{- with $values.secrets.apiKey }}
    {{- if .name }}
    - name: api-key
      secret: {secretName: {{ .name }}, items: [{key: {{ .key }}, path: api-key}], defaultMode: 288}
    {{- end }}
    {{- end }}
    {{- with $values.secrets.hfToken }}
    {{- if .name }}
    - name: hf-token
      secret: {secretName: {{ .name }}, items: [{key: {{ .key }}, path: token}], defaultMode: 288}
    {{- end }}
    {{- end }}
{{- end }}
