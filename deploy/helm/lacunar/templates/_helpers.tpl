{{- define "lacunar.name" -}}
{{- printf "%s" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end }}
{{- define "lacunar.selector" -}}
app.kubernetes.io/name: lacunar
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "lacunar.labels" -}}
{{ include "lacunar.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- define "lacunar.metadata" -}}
name: {{ include "lacunar.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "lacunar.labels" . | nindent 2 }}
{{- end }}
