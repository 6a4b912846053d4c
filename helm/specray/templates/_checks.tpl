{{/* Refuses combinations of values that cannot work. */}}
{{- define "specray.checks" -}}
{{- $names := list -}}
{{- range .Values.workerGroups -}}
{{- $names = append $names .name -}}
{{- $least := hasKey . "minReplicas" | ternary .minReplicas .replicas | int -}}
{{- $most := hasKey . "maxReplicas" | ternary .maxReplicas .replicas | int -}}
{{- if or (gt $least (int .replicas)) (gt (int .replicas) $most) -}}
{{- fail (printf "workerGroups %s: minReplicas %d, replicas %d, maxReplicas %d must not fall" .name $least (int .replicas) $most) -}}
{{- end -}}
{{- end -}}
{{- if ne (len $names) (len (uniq $names)) -}}
{{- fail "workerGroups: two groups have the same name" -}}
{{- end -}}
{{- $termination := int .Values.gracePeriods.terminationSeconds -}}
{{- $drain := int .Values.gracePeriods.drainSeconds -}}
{{- if lt $termination (add $drain 15 | int) -}}
{{- fail (printf "gracePeriods.terminationSeconds is %d; allowed: drainSeconds + 15 = %d or more" $termination (add $drain 15 | int)) -}}
{{- end -}}
{{- if ne .Values.config.rpc.listen "node" -}}
{{- fail "config.rpc.listen is loopback; allowed: node, since engines and router are in several pods" -}}
{{- end -}}
{{- if not (or .Values.networkPolicy.enabled .Values.config.rpc.tls .Values.config.rpc.secret_file) -}}
{{- fail "networkPolicy.enabled is false, and config.rpc has neither tls nor secret_file: every pod of the cluster could use the engines; allowed: one of them" -}}
{{- end -}}
{{- if not (dig "namespaceSelector" "matchLabels" dict .Values.networkPolicy.operator) -}}
{{- fail "networkPolicy.operator.namespaceSelector selects all namespaces; allowed: labels of the operator's, as kubernetes.io/metadata.name: kuberay-operator" -}}
{{- end -}}
{{- range $part := list "http" "grpc" -}}
{{- $section := get $.Values.config $part -}}
{{- if and $section.port (regexMatch "^(127\\.[0-9.]*|localhost|::1|\\[::1\\])$" $section.host) -}}
{{- fail (printf "config.%s.host is %s; allowed: an address that a Service reaches, as 0.0.0.0" $part $section.host) -}}
{{- end -}}
{{- end -}}
{{- if eq (dig "http" "server" "auto" .Values.config) "ingress" -}}
{{- fail "config.http.server is ingress; allowed: proxy, auto, since Serve's proxy has config.http.port in every pod" -}}
{{- end -}}
{{- if eq (int .Values.config.http.port) (int .Values.config.grpc.port) -}}
{{- fail (printf "config.grpc.port: %d is config.http.port as well; they must differ" (int .Values.config.grpc.port)) -}}
{{- end -}}
{{- if and .Values.models.existingClaim .Values.models.download -}}
{{- fail "models: existingClaim and download exclude each other" -}}
{{- end -}}
{{- range .Values.models.download -}}
{{- range .groups -}}
{{- if not (has . $names) -}}{{- fail (printf "models.download: there is no worker group %s" .) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- range $part := list "ingress" "draft" "target" -}}
{{- if not (include "specray.groupsOf" (dict "root" $ "part" $part)) -}}
{{- $wanted := dig $part "ray_actor_options" "label_selector" "specray.io/group" "" $.Values.config -}}
{{- fail (printf "config.%s.ray_actor_options.label_selector: there is no worker group %s" $part $wanted) -}}
{{- end -}}
{{- end -}}
{{- range $model := .Values.config.models -}}
{{- range $part := list "draft" "target" -}}
{{- $of := dict "Values" (dict "config" $model "workerGroups" $.Values.workerGroups) -}}
{{- if not (include "specray.groupsOf" (dict "root" $of "part" $part)) -}}
{{- $wanted := dig $part "ray_actor_options" "label_selector" "specray.io/group" "" $model -}}
{{- fail (printf "config.models %s: %s.ray_actor_options.label_selector: there is no worker group %s" $model.name $part $wanted) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if .Values.config.grpc.port -}}
{{- $num := dig "ingress" "num_replicas" 1 .Values.config | int -}}
{{- $group := include "specray.ingressGroup" . -}}
{{- range .Values.workerGroups -}}
{{- $most := hasKey . "maxReplicas" | ternary .maxReplicas .replicas | int -}}
{{- if and (eq .name $group) (gt $most $num) -}}
{{- fail (printf "workerGroups %s: of %d pods those without an Ingress would refuse gRPC; allowed: config.ingress.num_replicas = %d or less" $group $most $num) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $auth := dig "auth" dict .Values.config -}}
{{- $isOpen := or (not $auth.keys) (has "/metrics" (default list $auth.open_paths)) -}}
{{- if and .Values.podMonitors.enabled (not $isOpen) (not .Values.podMonitors.keySecret.name) -}}
{{- fail "podMonitors.keySecret: config.auth.keys close /metrics; name a Secret, or list /metrics in config.auth.open_paths" -}}
{{- end -}}
{{- if .Values.gcsFaultTolerance.enabled -}}
{{- $_ := required "gcsFaultTolerance.redisAddress: host:port of the Redis" .Values.gcsFaultTolerance.redisAddress -}}
{{- $_ = required "gcsFaultTolerance.existingSecret: the Secret with its password" .Values.gcsFaultTolerance.existingSecret -}}
{{- end -}}
{{- end }}
