{{/* KubeRay appends to the name: 47 characters are left of a label's 63. */}}
{{- define "specray.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $full .Values.fullnameOverride | trunc 47 | trimSuffix "-" -}}
{{- end }}

{{- define "specray.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: specray
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Labels of pods. None of the chart's other labels: a change here makes KubeRay start a second cluster. */}}
{{- define "specray.podLabels" -}}
specray.io/service: {{ include "specray.fullname" . }}
{{- end }}

{{- define "specray.image" -}}
{{- $repository := required "image.repository: build cluster/Dockerfile, push it, and name it here" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end }}

{{- define "specray.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "specray.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{- define "specray.httpPort" -}}
{{ int .Values.config.http.port }}
{{- end }}

{{- define "specray.grpcPort" -}}
{{ int .Values.config.grpc.port }}
{{- end }}

{{/* Names of the worker groups that a part's label selector allows, separated by commas; all without a selector.
     Ray's rules for one label: v, !v, in(v,w), !in(v,w). */}}
{{- define "specray.groupsOf" -}}
{{- $wanted := dig .part "ray_actor_options" "label_selector" "specray.io/group" "" .root.Values.config -}}
{{- $isNot := hasPrefix "!" $wanted -}}
{{- $value := trimPrefix "!" $wanted -}}
{{- $values := list $value -}}
{{- if regexMatch "^in\\(.*\\)$" $value -}}
{{- $values = list -}}
{{- range splitList "," (trimSuffix ")" (trimPrefix "in(" $value)) -}}
{{- $values = append $values (trim .) -}}
{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- range .root.Values.workerGroups -}}
{{- if or (not $wanted) (ne (has .name $values) $isNot) -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- end -}}
{{- $names | uniq | join "," -}}
{{- end }}

{{/* The worker group whose pods answer gRPC: the only one that the configuration allows the Ingress. */}}
{{- define "specray.ingressGroup" -}}
{{- $group := include "specray.groupsOf" (dict "root" . "part" "ingress") -}}
{{- if contains "," $group -}}
{{- $group = "" -}}
{{- end -}}
{{- required "config.grpc.port: with several worker groups, config.ingress.ray_actor_options.label_selector must say in which one specray.io/group the Ingress is; or 0 for no gRPC" $group -}}
{{- end }}

{{- /* Keys that change while serving, as in specray/config/live.py. */}}
{{- define "specray.liveKeys" -}}
speculation: [num_speculative_tokens, verification, overlap, tree, fallback, lookahead, past_output_tokens]
router: [max_queued_requests, max_queued_tokens, prefill_chunk_tokens, max_prefill_slowdown, stream_interval_ms, slo]
ingress: [excess_max_tokens]
auth: [keys, open_paths]
http: [max_body_bytes, unknown_fields, images, first_token_grace_s]
chat: [allow_special_tokens]
logging: [format, level, requests]
{{- end -}}

{{- define "specray.serveConfig" -}}
{{- $timeout := dig "router" "request_timeout_s" 600 .Values.config -}}
{{- $draft := dig "draft" (dict) .Values.config -}}
{{- $model := dig "model" "" $draft -}}
{{- $loads := and $model (not (has $model (list "ngram" "suffix" "lookahead"))) (dig "enabled" true $draft) -}}
{{- $replicates := or (dig "autoscaling" (dict) $draft) (gt (int (dig "num_replicas" 1 $draft)) 0) -}}
{{- $args := .Values.config -}}
{{- if and $loads $replicates -}}
{{- $args = merge (dict "draft" (omit $draft "model")) (omit .Values.config "draft") -}}
{{- end -}}
{{- $names := fromYaml (include "specray.liveKeys" .) -}}
{{- if .Values.config.models -}}
{{- /* What is a default for each model's own deployments is no live value of this application's. */ -}}
{{- $names = omit $names "speculation" "router" "chat" -}}
{{- end -}}
{{- $static := dict -}}
{{- $live := dict -}}
{{- range $section, $values := $args -}}
{{- if and (hasKey $names $section) (kindIs "map" $values) -}}
{{- $taken := pick $values -}}
{{- $left := $values -}}
{{- range get $names $section -}}
{{- $taken = merge $taken (pick $values .) -}}
{{- $left = omit $left . -}}
{{- end -}}
{{- if $left -}}
{{- $_ := set $static $section $left -}}
{{- end -}}
{{- if $taken -}}
{{- $_ := set $live $section $taken -}}
{{- end -}}
{{- else -}}
{{- $_ := set $static $section $values -}}
{{- end -}}
{{- end -}}
proxy_location: EveryNode
http_options:
  host: {{ .Values.config.http.host | quote }}
  port: {{ include "specray.httpPort" . }}
  # The router ends a request at its own deadline first, with a message.
  request_timeout_s: {{ addf $timeout 30 }}
  keep_alive_timeout_s: 90
logging_config:
  encoding: JSON
  log_level: {{ .Values.logLevel }}
  enable_access_log: false
applications:
  - name: specray
    route_prefix: /
    import_path: specray.serving.app:build_app
    args:
      {{- toYaml $static | nindent 6 }}
    # A change of args replaces every deployment. One of user_config takes effect while they serve: of a Draft
    # its model and logging, of the others what changes while serving.
    deployments:
      - name: Ingress
        user_config:
          {{- toYaml $live | nindent 10 }}
      {{- if not .Values.config.models }}
      - name: Router
        user_config:
          {{- toYaml (omit $live "auth") | nindent 10 }}
      {{- if $replicates }}
      {{- if ne (toString (dig "enabled" true $draft)) "false" }}
      {{- if not (has $model (list "ngram" "suffix" "lookahead")) }}
      - name: Draft
        user_config:
          {{- toYaml (merge (dict "draft" (ternary (dict "model" $model) (dict) (ne $model ""))) (pick $live "logging")) | nindent 10 }}
      {{- end }}
      {{- end }}
      {{- end }}
      {{- end }}
{{- end }}

{{- define "specray.podSpec" -}}
{{- $root := .root -}}
{{- $group := .group -}}
serviceAccountName: {{ include "specray.serviceAccountName" $root }}
automountServiceAccountToken: {{ .needsApi }}
terminationGracePeriodSeconds: {{ int $root.Values.gracePeriods.terminationSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ $root.Values.runAsUser }}
  fsGroup: {{ $root.Values.runAsUser }}
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $group.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $group.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $group.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "specray.container" -}}
image: {{ include "specray.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{ include "specray.containerSecurity" . }}
{{- end }}

{{- define "specray.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  readOnlyRootFilesystem: true
{{- end }}

{{/* What a container may write: Ray's files in /tmp, and caches and compiled kernels in the home directory. */}}
{{- define "specray.writableMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/specray}
{{- end }}

{{- define "specray.writableVolumes" -}}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
{{- end }}

{{- define "specray.environment" -}}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: {{ int .Values.gracePeriods.drainSeconds | quote }}
- name: SPECRAY_LOG_LEVEL
  value: {{ .Values.logLevel }}
{{- end }}

{{/* Init containers of a group, one per download that it needs. */}}
{{- define "specray.downloads" -}}
{{- $root := .root -}}
{{- $group := .group -}}
{{- range $index, $item := $root.Values.models.download }}
{{- if or (not $item.groups) (has $group.name $item.groups) }}
- name: download-{{ $index }}-{{ $item.name }}
  {{- include "specray.container" $root | nindent 2 }}
  command:
    - hf
    - download
    - {{ $item.repository | quote }}
    - --revision={{ $item.revision }}
    - --local-dir={{ $root.Values.models.path }}/{{ $item.name }}
    {{- range $item.include }}
    - --include={{ . }}
    {{- end }}
  env:
    - name: HF_HUB_DISABLE_TELEMETRY
      value: "1"
    - name: HF_HOME
      value: /tmp/huggingface
    {{- with $root.Values.models.tokenSecret.name }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ . }}, key: {{ $root.Values.models.tokenSecret.key }}}
    {{- end }}
  resources:
    requests: {cpu: 500m, memory: 1Gi}
    limits: {memory: 2Gi}
  volumeMounts:
    {{- include "specray.writableMounts" $root | nindent 4 }}
    - name: models
      mountPath: {{ $root.Values.models.path }}
{{- end }}
{{- end }}
{{- end }}
