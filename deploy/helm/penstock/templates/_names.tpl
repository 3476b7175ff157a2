{{- define "labels" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "folder" -}}
{{- with .Values.model -}}
{{- .path | default (printf "/models/hub/models--%s/snapshots/%s" (replace "/" "--" .name) .revision) -}}
{{- end -}}
{{- end }}

{{- define "config" -}}
{{- $own := dict "model" (include "folder" .) "served_model_name" (list .Values.model.servedName) "drain_timeout" .Values.drainSeconds -}}
{{- if .Values.gateway.enabled }}{{ $_ := set $own "metrics_compat" "vllm" }}{{ end -}}
{{- merge $own .Values.config | toYaml -}}
{{- end }}

{{- define "image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}

{{- define "secret" -}}
{{ .Values.secret.name | default .Release.Name }}
{{- end }}

{{- define "claim" -}}
{{ .Values.storage.existingClaim | default (printf "%s-models" .Release.Name) }}
{{- end }}

{{- define "seconds" -}}
{{- $seconds := 0 -}}
{{- range regexFindAll "[0-9]+[hms]" . -1 -}}
{{- $unit := get (dict "h" 3600 "m" 60 "s" 1) (regexFind "[hms]" .) -}}
{{- $seconds = add $seconds (mul (regexFind "[0-9]+" . | atoi) $unit) -}}
{{- end -}}
{{- $seconds -}}
{{- end }}

{{- define "restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
