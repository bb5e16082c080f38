{{- define "vramcast.labels" -}}
app.kubernetes.io/name: vramcast
{{- end }}
{{- define "vramcast.host" -}}
vramcast.{{ .Release.Namespace }}.svc
{{- end }}
